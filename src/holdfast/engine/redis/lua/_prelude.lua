-- Put before every script, after the generated table MOVES of legal moves and LANES, how many tenants have a lane.
-- Scripts isolate but do not roll back: each reads and checks first, then writes what cannot fail.
--
-- A job's record is `<place> <state> <token>\n<body>`. The place is `<line>:<message id>` while the message is in a
-- stream and `-` otherwise; the token names the last settled attempt; the body, a packed array, is there only when no
-- message carries the job (or when the message is out of date: retries that wait in the pending list).
--
-- A line is one stream, a lane the lines of one tenant: one for each priority, and one for jobs that are taken out of
-- their turn. Lane 0 is always there. `queue:lanes` says whose the others are; `lanes` in the controls names those that
-- may have a message. Keys have to be declared, and a caller cannot know which lanes a step needs: it declares those that
-- it knows of (the last keys; the last argument names them), and is told what is missing before anything is written.

local call = redis.call
local STREAMS_PER_LANE, DIRECT = 4, 3 -- lines a lane; the one for jobs that are taken

-- Positions in a body.
local TASK, PAYLOAD, TENANT, KEY, TRACE, META, ATTEMPTS, RETRIES, CREATED, STREAM_INDEX, RUN_AT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11

local CHUNK = 1000 -- unpack fails beyond 7,999 values

local function format_integer(value)
  return string.format('%.0f', value)
end

-- A number in a concatenation costs more than all the rest of it.
local POSITION_PREFIX = setmetatable({ [0] = '0:', '1:', '2:', '3:' }, {
  __index = function(positions, index)
    local position = format_integer(index) .. ':'
    rawset(positions, index, position)
    return position
  end,
})

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function position_of(record)
  return string.match(record, '^(%S+)')
end

local function parse_record(record)
  return string.match(record, '^(%S+) (%S+) (%S*)\n?(.*)$')
end

local function split_position(position)
  local index, id = string.match(position, '^(%d+):(.+)$')
  return tonumber(index), id
end

-- Whether holdfast wrote this message: its own fields in its own order (`wire.is_ours` says the same).
local function is_native(fields)
  return fields[1] == 'holdfast' and fields[3] == 'task_id' and fields[5] == 'type' and fields[7] == 'payload'
    and (#fields == 8 or #fields == 16)
end

-- A key of another type under one of our names must be noticed before the first write: a script does not roll back.
local function check_types(streams, sets, hashes)
  for _, key in pairs(streams) do call('XLEN', key) end
  for _, key in ipairs(sets) do call('ZCARD', key) end
  for _, key in ipairs(hashes) do call('HLEN', key) end
end

-- Calls a command on many values, a thousand at a time.
local function in_chunks(values, call)
  for first = 1, #values, CHUNK do
    call(unpack(values, first, math.min(first + CHUNK - 1, #values)))
  end
end

-- One message in a line, its header fresh. Returns its place. What a job does not have, its message does not say: reading
-- eight values instead of sixteen is a third of what a claim costs.
local function append_message(streams, index, body, state, job_id)
  local id
  local head = '1 ' .. state .. ' ' .. body[ATTEMPTS] .. ' ' .. body[RETRIES] .. ' ' .. body[CREATED]
  if body[TENANT] == 'default' and body[KEY] == job_id and body[TRACE] == '' and body[META] == '' then
    id = redis.call('XADD', streams[index + 1], '*',
      'holdfast', head, 'task_id', job_id, 'type', body[TASK], 'payload', body[PAYLOAD])
  else
    id = redis.call('XADD', streams[index + 1], '*',
      'holdfast', head, 'task_id', job_id, 'type', body[TASK], 'payload', body[PAYLOAD],
      'tenant_id', body[TENANT], 'idempotency_key', body[KEY], 'trace_id', body[TRACE], 'meta', body[META])
  end
  return POSITION_PREFIX[index] .. id
end

-- The tenant of a message, as the feed tells it: nothing for the default one, which short messages have.
local function tenant_of(fields)
  local tenant = ''
  if fields[9] == 'tenant_id' then
    tenant = fields[10]
  else
    for i = 1, #fields, 2 do
      if fields[i] == 'tenant_id' then tenant = fields[i + 1] end
    end
  end
  return tenant ~= 'default' and tenant or ''
end

-- Tells a feed entry from another at the same position.
local function nonce_of(fields)
  for i = 1, #fields, 2 do
    if fields[i] == 'nonce' then return fields[i + 1] end
  end
  return ''
end

-- One feed entry for one atomic step, bounded while nobody has ever registered as its reader. `packed` is told as it came
-- from the caller, all but the positions in `skipped`: packing it again would cost more than most of the step.
-- `urgent`: somebody waits until the ledger has it.
local function append_packed_feed(key, limit, reader, nonce, kind, at, worker, packed, skipped, urgent)
  local omitted = #skipped > 0 and cmsgpack.pack(skipped) or ''
  if urgent then
    local command = { 'XADD', key, '*',
      'kind', kind, 'at', at, 'worker', worker, 'nonce', nonce, 'moves', packed, 'skipped', omitted, 'urgent', '1' }
    if not reader then
      table.insert(command, 3, 'MAXLEN')
      table.insert(command, 4, '~')
      table.insert(command, 5, limit)
    end
    return redis.call(unpack(command))
  end
  if reader then
    return redis.call('XADD', key, '*',
      'kind', kind, 'at', at, 'worker', worker, 'nonce', nonce, 'moves', packed, 'skipped', omitted)
  end
  return redis.call('XADD', key, 'MAXLEN', '~', limit, '*',
    'kind', kind, 'at', at, 'worker', worker, 'nonce', nonce, 'moves', packed, 'skipped', omitted)
end

local function append_feed(key, limit, reader, nonce, kind, at, worker, moves)
  if #moves == 0 then return '' end
  return append_packed_feed(key, limit, reader, nonce, kind, at, worker, cmsgpack.pack(moves), {})
end

-- Tells those who sleep until the next job is due, if this one is due earlier than all others.
local function notify_if_earliest(set, notices, due)
  local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  if first[2] and tonumber(first[2]) >= tonumber(due) then
    redis.call('XADD', notices, 'MAXLEN', '~', 1000, '*', 'due', due)
  end
end

-- What the pending list says. Nothing where the line, or its group, is not there: a lane that nobody uses is given back.
local function pending(stream, group, ...)
  local rows = redis.pcall('XPENDING', stream, group, ...)
  if rows.err then
    if string.find(rows.err, 'NOGROUP', 1, true) then return {} end
    error(rows.err)
  end
  return rows
end

-- Which of its entries does the worker hold, and delivered how often? One range question while its pending list is short
-- in that span; single questions, about the ids that `list_ids` gives, for what the range did not reach.
local function deliveries_held(stream, group, worker, wanted, low, high, list_ids)
  local held = {}
  local count = 4 * wanted + 16
  local rows = pending(stream, group, low, high, count, worker)
  for i = 1, #rows do held[rows[i][1]] = rows[i][4] end
  if #rows == count then
    for _, id in ipairs(list_ids()) do
      if not held[id] then
        local row = pending(stream, group, id, id, 1, worker)[1]
        if row then held[id] = row[4] end
      end
    end
  end
  return held
end

-- Wakes callers that wait for these jobs to end; each listens on a channel named after the job.
local function publish_finished(waiters, job_ids)
  if #job_ids == 0 or redis.call('EXISTS', waiters) == 0 then return end
  for first = 1, #job_ids, CHUNK do
    local last = math.min(first + CHUNK - 1, #job_ids)
    local wanted = redis.call('HMGET', waiters, unpack(job_ids, first, last))
    for offset, waits in ipairs(wanted) do
      if waits then
        local job_id = job_ids[first + offset - 1]
        redis.call('PUBLISH', waiters .. ':' .. job_id, job_id)
        redis.call('HDEL', waiters, job_id)
      end
    end
  end
end
