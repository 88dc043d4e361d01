"""Write reports of runs and experiments: Markdown, plots, HTML pages."""
