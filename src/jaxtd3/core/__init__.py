"""What everything else stands on: the types, devices and processes, tracing."""
