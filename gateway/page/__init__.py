"""The page at `/`: static files, which gateway/routes/page.py serves unchanged."""
