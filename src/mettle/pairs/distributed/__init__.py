"""Any loss over the batch of all ranks, with the value and gradient of one process."""
