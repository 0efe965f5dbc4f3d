"""The commands that need no Prefect, a row each: their arguments, and what they do. Who needs heavy packages imports them."""

from pipeline.commands import asking, making, showing

COMMANDS = (*making.COMMANDS, *asking.COMMANDS, *showing.COMMANDS)
