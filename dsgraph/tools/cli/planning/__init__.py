"""Commands that show layouts, schedules and configurations."""
