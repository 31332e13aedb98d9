"""The command line of kvd: `kvd_cli.main` is the program, `kvd_cli.program` its commands and their errors."""
