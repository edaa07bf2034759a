"""What a run has to show: plots and a table from the files it left behind. Plain Python; matplotlib only where a plot is drawn."""
