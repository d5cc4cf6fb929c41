"""Where templates are kept: one set of verbs over SQLite and PostgreSQL."""
