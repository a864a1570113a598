-- prune_notices: only the latest are kept; who comes later has missed them.
-- Takes  :keep
DELETE FROM notices WHERE id <= (SELECT max(id) FROM notices) - :keep
