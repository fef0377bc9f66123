"""Workers for every device, and the calls that they run."""
