"""`python -m jaxtd3 COMMAND`."""

import sys

from jaxtd3.cli import main

sys.exit(main())
