"""Many weightings and settings as one program: plan, waves, results, report."""
