"""What files of traces look like: their lines, and the fields of each format, for whoever reads or writes them."""
