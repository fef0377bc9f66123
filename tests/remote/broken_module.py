"""A module whose import fails."""

raise LookupError("this module cannot be imported")
