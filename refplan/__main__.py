"""`python -m refplan` is the `refplan` command."""

from refplan.cli import main

raise SystemExit(main())
