"""`python -m jaxtd3.train`: the same as `jaxtd3 train`."""

import sys

from jaxtd3.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
