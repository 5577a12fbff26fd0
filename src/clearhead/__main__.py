"""`python -m clearhead` is the command `clearhead`."""

from clearhead.cli import main

main()
