"""One model on several ranks: processes, on one machine or more, that each hold a part of it."""
