"""The page at `/`: static files, served as they are by gateway/routes/page.py."""
