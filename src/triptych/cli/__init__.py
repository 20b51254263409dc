"""The `triptych` command line; every command imports what it needs when it runs, so that help is instant."""
