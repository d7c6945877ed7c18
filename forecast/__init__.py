"""The memory and the bytes of a run, predicted from the plan that training uses."""
