-- Shared by all scripts, after the generated constants: MOVES, the legal moves, and LANES, the number of lanes. A script is
-- loaded with the statements that it uses, so one at the top level begins with `local` and has no other effect.
-- Scripts are isolated but do not roll back: each reads and checks first, then makes writes that cannot fail.
--
-- A job's record is `<position> <state> <token>\n<body>`. The position is `<stream index>:<message id>` while a stream has
-- the message, and `-` otherwise. The token identifies the last settled attempt (`-`: there is none); after a `#` it has the
-- fingerprint of the schema that the submitter checked the payload with, or `~` if the message is a foreign one. The body, a
-- packed array, exists only if no message has the job, or if the message is out of date (retries that wait in the pending list).
--
-- A lane is the streams of one tenant: one for each priority, and one for jobs that are claimed by id. Lane 0 always
-- exists. `queue:lanes` has the owners of the others; `lanes` in the controls lists those that may have messages. Keys must
-- be declared, but a caller cannot know which lanes a step needs. It declares the lanes that it knows (the last keys; the
-- last argument lists them), and the reply lists missing ones before anything is written.

local call = redis.call
local STREAMS_PER_LANE, DIRECT = 4, 3 -- the stream of a lane for jobs claimed by id
local MAX_LANE = 2 * LANES

-- Positions in a body.
local TASK, PAYLOAD, TENANT, KEY, TRACE, META, ATTEMPTS, RETRIES, CREATED, STREAM_INDEX, RUN_AT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11

local CHUNK = 1000 -- unpack fails beyond 7,999 values

local function format_integer(value)
  return string.format('%.0f', value)
end

-- Cached: formatting a number costs more than the rest of the concatenation.
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

-- Other programs can write records. One that cannot be read is one without position, state, token and body.
local function parse_record(record)
  local position, state, token, packed = string.match(record, '^(%S+) (%S+) (%S*)\n?(.*)$')
  return position or '-', state or '', token or '', packed or ''
end

local function position_of(record)
  return string.match(record, '^(%S+)') or '-'
end

-- Unpack a table that another program may have written; nil if it is not one.
local function unpack_table(packed)
  local is_packed, values = pcall(cmsgpack.unpack, packed)
  return is_packed and type(values) == 'table' and values or nil
end

-- Unpack the body of a record; nil if it cannot be read.
local function unpack_body(packed)
  local body = packed ~= '' and unpack_table(packed) or {}
  for at = TASK, RUN_AT do
    if type(body[at]) ~= 'string' then return nil end
  end
  local index = tonumber(body[STREAM_INDEX])
  return (index == 0 or index == 1 or index == 2) and body or nil
end

-- What a token says of the submission, with its `#`: the fingerprint of a schema, or `FOREIGN`; '' if it says nothing.
local FOREIGN = '#~'

local function origin_in(token)
  return string.match(token, '#%x+$') or string.match(token, FOREIGN .. '$') or ''
end

-- The value of an idempotency key: the first job's id, then a newline and the fingerprint of its submission. The previous
-- version wrote no fingerprint.
local FINGERPRINT = 16

local function parse_key(value)
  if string.byte(value, -FINGERPRINT - 1) == 10 then return string.sub(value, 1, -FINGERPRINT - 2), string.sub(value, -FINGERPRINT) end
  return value, ''
end

local function key_value(job_id, fingerprint)
  return #fingerprint == FINGERPRINT and job_id .. '\n' .. fingerprint or job_id
end

-- Whether two fingerprints are certainly of different requests, as in `core.fingerprint`.
local function is_key_reused(first, second)
  if first == second or #first ~= FINGERPRINT or #second ~= FINGERPRINT then return false end
  return string.sub(first, 1, 4) ~= string.sub(second, 1, 4) or string.byte(first, 5) == string.byte(second, 5)
end

-- Whether these digits are a part of a message id, which has 64 bits.
local function is_id_part(digits)
  return #digits < 20 or (#digits == 20 and digits <= '18446744073709551615')
end

-- Stream index and message id; nil if a stream does not have the message.
local function split_position(position)
  local index, instant, number = string.match(position, '^(%d+):(%d+)%-(%d+)$')
  index = tonumber(index)
  if index and index < STREAMS_PER_LANE * (MAX_LANE + 1) and is_id_part(instant) and is_id_part(number) then
    return index, instant .. '-' .. number
  end
end

-- Whether holdfast wrote the message with these fields. The name of its first field is the queue's marker, a secret that
-- programs with no other right than XADD cannot read. A message with an older marker, or with the one of the previous version,
-- is native if the record, which such programs cannot write, has its position (nil: unknown). Renames the first field for the
-- caller, so that the secret does not leave Redis: `holdfast` if the message is native, else `holdfast?`. Call it once.
local function is_native(fields, marker, record, position)
  local first = fields[1]
  if first ~= marker then
    if not first or string.sub(first, 1, 8) ~= 'holdfast' then return false end
    local known, _, token = parse_record(record or '')
    if known ~= position or not known or origin_in(token) == FOREIGN then
      fields[1] = 'holdfast?'
      return false
    end
  end
  fields[1] = 'holdfast'
  return fields[3] == 'task_id' and fields[5] == 'type' and fields[7] == 'payload' and (#fields == 8 or #fields == 16)
end

-- Bytes of the feed that were read, as kept in the controls; 0 if that cannot be read.
local function read_bytes(text)
  local bytes = tonumber(text or 0)
  return bytes and bytes >= 0 and bytes < 1e15 and bytes or 0
end

-- A limit in the controls; nil if it is not set, or cannot be read.
local function read_limit(text)
  return text and #text <= 15 and string.match(text, '^%d+$') and tonumber(text) or nil
end

-- The retries in the body of a record; nil if there is no body, or it cannot be read.
local function known_retries(record)
  local _, _, _, packed = parse_record(record)
  local body = packed ~= '' and unpack_body(packed)
  return body and body[RETRIES]
end

-- Fail on a key of another type before the first write: a script does not roll back.
local function check_types(streams, sets, hashes)
  for _, key in pairs(streams) do call('XLEN', key) end
  for _, key in ipairs(sets) do call('ZCARD', key) end
  for _, key in ipairs(hashes) do call('HLEN', key) end
end

-- Call a command with many values, a thousand at a time.
local function in_chunks(values, call)
  for first = 1, #values, CHUNK do
    call(unpack(values, first, math.min(first + CHUNK - 1, #values)))
  end
end

-- Append a message with a new header to a stream. Returns its position. `to` has the streams and the marker. Fields that a job
-- does not use are omitted: reading eight values instead of sixteen saves a third of the cost of a claim.
local function append_message(to, index, body, state, job_id)
  local id
  local stream = to.streams[index + 1]
  local head = '1 ' .. state .. ' ' .. body[ATTEMPTS] .. ' ' .. body[RETRIES] .. ' ' .. body[CREATED]
  if body[TENANT] == 'default' and body[KEY] == job_id and body[TRACE] == '' and body[META] == '' then
    id = redis.call('XADD', stream, '*',
      to.marker, head, 'task_id', job_id, 'type', body[TASK], 'payload', body[PAYLOAD])
  else
    id = redis.call('XADD', stream, '*',
      to.marker, head, 'task_id', job_id, 'type', body[TASK], 'payload', body[PAYLOAD],
      'tenant_id', body[TENANT], 'idempotency_key', body[KEY], 'trace_id', body[TRACE], 'meta', body[META])
  end
  return POSITION_PREFIX[index] .. id
end

-- The tenant of a message as in the feed: '' for the default tenant, which short messages have.
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

-- The nonce of a feed entry, which distinguishes it from another entry at the same position.
local function nonce_of(fields)
  for i = 1, #fields, 2 do
    if fields[i] == 'nonce' then return fields[i + 1] end
  end
  return ''
end

-- Append one feed entry for one atomic step. The feed is bounded while no reader was ever attached. `packed` is written as
-- the caller sent it, with the positions to ignore in `skipped`: packing it again would cost more than most of the step.
-- `urgent`: a caller waits until the ledger has the entry.
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

-- Notify processes that wait for the next due job, if this job is due before all others.
local function notify_if_earliest(set, notices, due)
  local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  if first[2] and tonumber(first[2]) >= tonumber(due) then
    redis.call('XADD', notices, 'MAXLEN', '~', 1000, '*', 'due', due)
  end
end

-- XPENDING. Empty if the stream or its group does not exist: an unused lane is released.
local function pending(stream, group, ...)
  local rows = redis.pcall('XPENDING', stream, group, ...)
  if rows.err then
    if string.find(rows.err, 'NOGROUP', 1, true) then return {} end
    error(rows.err)
  end
  return rows
end

-- Whether a time in milliseconds is in the past, but not longer ago than that.
local function is_recent(at, within)
  local ago = now_ms() - (tonumber(at or '') or 0)
  return ago >= 0 and ago < within
end

-- Delivery counts, by id, of entries that are pending for the worker. One range query while the pending list is short in
-- that range; single queries, for the ids that `list_ids` returns, for entries that the range did not reach. Idle times are
-- added to the table `idle`, if given.
local function deliveries_held(stream, group, worker, expected, low, high, list_ids, idle)
  local counts = {}
  local count = 4 * expected + 16
  local rows = pending(stream, group, low, high, count, worker)
  for i = 1, #rows do counts[rows[i][1]] = rows[i][4] end
  for i = 1, idle and #rows or 0 do idle[rows[i][1]] = rows[i][3] end
  if #rows == count then
    for _, id in ipairs(list_ids()) do
      if not counts[id] then
        local row = pending(stream, group, id, id, 1, worker)[1]
        if row then counts[id] = row[4] end
        if row and idle then idle[id] = row[3] end
      end
    end
  end
  return counts
end

-- Wake callers that wait for these jobs to finish; each listens on a channel named after the job.
local function publish_finished(waiters, job_ids)
  if #job_ids == 0 or redis.call('EXISTS', waiters) == 0 then return end
  for first = 1, #job_ids, CHUNK do
    local last = math.min(first + CHUNK - 1, #job_ids)
    local flags = redis.call('HMGET', waiters, unpack(job_ids, first, last))
    for offset, waits in ipairs(flags) do
      if waits then
        local job_id = job_ids[first + offset - 1]
        redis.call('PUBLISH', waiters .. ':' .. job_id, job_id)
        redis.call('HDEL', waiters, job_id)
      end
    end
  end
end
