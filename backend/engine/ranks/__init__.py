"""One model divided among ranks: processes, on one machine or several, that each hold a part."""
