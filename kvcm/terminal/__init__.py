"""The parts that commands and doctor share: the client of a manager, exit codes and tables."""
