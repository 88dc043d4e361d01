"""List the cells of each experiment and name the table that is made of them; nothing is measured here."""
