"""List the cells of each experiment and describe the table that is made of them; nothing is measured here."""
