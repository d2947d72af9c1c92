"""`python -m jaxtd3 COMMAND`."""

import sys

from jaxtd3.cli.main import main

sys.exit(main())
