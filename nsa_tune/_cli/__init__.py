"""Parts of the command line: progress, and how answers are printed."""
