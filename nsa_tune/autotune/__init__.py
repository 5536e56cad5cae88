"""The offline autotuner: measures the arms of decision points and stores what it measures."""
