-- last_notice: where a new listener begins.
-- Gives  [the latest notice's id]
SELECT json_array(coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'notices'), 0))
