"""What everything else stands on: the types, devices and processes, tracing.

Whatever computes imports this first, from the command line, from `jaxtd3` or from a module of it.
"""

from jaxtd3 import runtime

runtime.fix_compiler()
