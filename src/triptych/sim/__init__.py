"""Virtual time over the machines of `triptych.core`: whole clusters with faults, in milliseconds, from a seed."""
