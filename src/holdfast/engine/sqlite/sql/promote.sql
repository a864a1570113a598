-- promote: jobs that are due go in line, in the order in which they fell due.
-- Takes  :queue, :now, :limit
UPDATE jobs SET line = due_at, due_at = NULL, updated_at = :now
 WHERE id IN (
    SELECT id FROM jobs
     WHERE queue = :queue AND due_at IS NOT NULL AND due_at <= :now
     ORDER BY due_at LIMIT :limit)
