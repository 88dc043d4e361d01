"""Write reports of runs and experiments: Markdown, plots, one HTML page."""
