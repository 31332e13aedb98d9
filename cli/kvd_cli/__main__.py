"""`python -m kvd_cli` does what `kvd` does."""

from kvd_cli.main import main

main()
