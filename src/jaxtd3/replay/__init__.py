"""The replay ring on the device, uniform and prioritised."""
