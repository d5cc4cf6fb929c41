"""The methods: what one optimization step does."""
