"""The methods: what one optimization step does, one file for each."""
