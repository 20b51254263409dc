"""Starting, watching and stopping Triptych's processes on one machine, from the command line and from Python."""
