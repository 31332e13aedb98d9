"""The command line of kvd: `kvd_cli.main` is the program, each other file a family of its commands."""
