"""What commands and doctor share: clients, exit codes and tables of the terminal."""
