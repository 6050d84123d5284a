"""Private training inside other libraries' loops; each module needs the extra of its name."""
