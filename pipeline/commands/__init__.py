"""The commands that need no Prefect, with their arguments and functions.

Each function imports the heavy packages that it needs.
"""

from pipeline.commands import asking, making, showing

COMMANDS = (*making.COMMANDS, *asking.COMMANDS, *showing.COMMANDS)
