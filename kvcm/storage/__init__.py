"""Address allocation and deletion for each storage type. One type, one file; the bytes themselves never come here."""
