"""`jaxtd3 bench`: physics engines beside each other. All else is measured from a checkout."""
