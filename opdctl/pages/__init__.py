"""Pages for people who were not there: one HTML file each, with its pictures inside and nothing from outside."""
