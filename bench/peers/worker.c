// A worker that costs almost nothing and speaks to every router measured here: one-thread epoll server on consecutive
// loopback ports, so that each router is measured against the same program.
//
//   worker BASE_PORT PORTS PREFILL_PORTS
//
// The first PREFILL_PORTS ports are context (prefill) workers. POST to a completions path is answered plain or streamed,
// with what the router's kind of hand-off needs: disaggregated_params (TensorRT-LLM and this project),
// kv_transfer_params (vLLM) or one token (SGLang, whose prefill workers see bootstrap_room). A path that ends in /render
// is answered with token ids, as vLLM does. Every token's text is "@<monotonic ns, 20 digits>@".
//
// GET /kv_events/stream: this project's event stream, open until the reader leaves
// GET /_ctl?itl_us=N     time between streamed tokens (0 = all at once)
// GET /_ctl?store=N      the context workers report N more made-up blocks between them
// GET /_stat             counts since the start, as JSON
#include "connections.h"

// ---------------------------------------------------------------- requests: looking into bodies

// What routers add stands before or after the prompt, which may be huge: only both ends are searched.
static int has(span body, const char *word) {
  size_t length = strlen(word);
  if (body.n <= 8192) return memmem(body.at, body.n, word, length) != NULL;
  return memmem(body.at, 2048, word, length) || memmem(body.at + body.n - 4096, 4096, word, length);
}

static long number_after(span text, const char *key, long otherwise) {
  const char *found = memmem(text.at, text.n, key, strlen(key));
  if (!found) return otherwise;
  for (found += strlen(key); found < text.at + text.n && strchr(" :\"", *found); found++) {}
  return strtol(found, NULL, 10);
}

static long number_in_body(span body, const char *key, long otherwise) {
  if (body.n <= 8192) return number_after(body, key, otherwise);
  long found = number_after((span){body.at, 2048}, key, -1);
  return found >= 0 ? found : number_after((span){body.at + body.n - 4096, 4096}, key, otherwise);
}

// The prompt's token ids as the JSON list that the request carries, empty if it carries a text.
static span token_list(span body) {
  static const char *names[] = {"\"prompt\":[", "\"prompt_token_ids\":["};
  for (int i = 0; i < 2; i++) {
    const char *found = memmem(body.at, body.n, names[i], strlen(names[i]));
    if (!found) continue;
    const char *start = found + strlen(names[i]) - 1, *end = memchr(start, ']', body.at + body.n - start);
    if (end) return (span){start, end + 1 - start};
  }
  return (span){NULL, 0};
}

// Made-up token ids, five digits each, one per five bytes of text.
static span made_up_ids(size_t bytes) {
  static char ids[1 << 21];
  size_t n = 0, count = bytes / 5 < 250000 ? bytes / 5 : 250000;
  ids[n++] = '[';
  for (size_t i = 0; i < count; i++) {
    unsigned value = 10000 + (i * 2654435761u >> 16) % 90000;
    if (i) ids[n++] = ',';
    for (int digit = 4; digit >= 0; digit--, value /= 10) ids[n + digit] = '0' + value % 10;
    n += 5;
  }
  ids[n++] = ']';
  return (span){ids, n};
}

// ---------------------------------------------------------------- streamed answers

static int token_event(conn *c, char *to) {
  const char *finish = c->left == 1 ? "\"length\"" : "null";
  unsigned long long t = now_ns();
  if (c->chat)
    return sprintf(to,
                   "data: {\"id\":\"chatcmpl-7f3a9c21\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
                   "\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{%s\"content\":\" @%020llu@\"},"
                   "\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
                   c->left == c->total ? "\"role\":\"assistant\"," : "", t, finish);
  return sprintf(to,
                 "data: {\"id\":\"cmpl-7f3a9c21\",\"object\":\"text_completion\",\"created\":1700000000,"
                 "\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\" @%020llu@\",\"logprobs\":null,"
                 "\"finish_reason\":%s,\"stop_reason\":null}]}\n\n",
                 t, finish);
}

static void stream(conn *c) {
  char event[1024];
  while (c->left > 0) {
    put_chunk(c, event, token_event(c, event));
    num_tokens++;
    if (--c->left == 0) {
      put_chunk(c, "data: [DONE]\n\n", 14);
      put(c, "0\r\n\r\n", 5);
    }
    if (flush(c) < 0) { close_conn(c); return; }
    if (c->left > 0 && itl_ns) {
      uint64_t t = now_ns();
      c->due = c->due + itl_ns < t ? t : c->due + itl_ns;
      enqueue(c);
      return;
    }
  }
  c->streaming = 0;
  serve_input(c);
}

// ---------------------------------------------------------------- KV events

static void put_key(char *to) {  // 16 bytes that never repeat, as base64
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  uint64_t value = ++stored_blocks * 0x9E3779B97F4A7C15ull;
  for (int i = 0; i < 21; i++) to[i] = digits[(value >> (i * 3)) & 63];
  memcpy(to + 21, "A==", 3);
}

static void open_events(conn *c) {
  static const char head[] =
      "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n";
  char line[128];
  put(c, head, sizeof head - 1);
  put_chunk(c, line, sprintf(line, "{\"incarnation\":\"w%d\",\"seq\":0,\"events\":[{\"cleared\":true}]}\n",
                             base_port + c->place));
  c->events = 1;
  c->seq = 1;
  c->next_reader = readers;
  readers = c;
  if (flush(c) < 0) close_conn(c);
}

static void store_blocks(long count) {
  enum { PER_BATCH = 1000 };
  static char line[PER_BATCH * 28 + 256];
  long num_readers = 0;
  for (conn *c = readers; c; c = c->next_reader) num_readers += c->place < num_prefill;
  for (conn *c = readers, *next; c; c = next) {
    next = c->next_reader;
    if (c->place >= num_prefill) continue;
    for (long left = count / num_readers; left > 0; left -= PER_BATCH) {
      int n = sprintf(line, "{\"incarnation\":\"w%d\",\"seq\":%llu,\"events\":[{\"stored\":[", base_port + c->place,
                      (unsigned long long)c->seq++);
      for (long i = 0; i < left && i < PER_BATCH; i++) {
        if (i) line[n++] = ',';
        line[n] = line[n + 25] = '"';
        put_key(line + n + 1);
        n += 26;
      }
      n += sprintf(line + n, "]}]}\n");
      put_chunk(c, line, n);
    }
    if (flush(c) < 0) close_conn(c);
  }
}

// ---------------------------------------------------------------- routes

static void serve_info(conn *c) {
  static char body[1024];
  const char *role = c->place < num_prefill ? "context" : "generation";
  answer(c, 200, body,
         sprintf(body,
                 "{\"engine\":\"trtllm-disagg\",\"role\":\"%s\",\"incarnation\":\"w%d\",\"max_batch_size\":64,"
                 "\"tokens_per_block\":32,\"version\":\"0.0.0\",\"model\":\"m\",\"model_path\":\"m\","
                 "\"served_model_name\":\"m\",\"tp_size\":1,\"dp_size\":1,\"load_balance_method\":\"round_robin\","
                 "\"disaggregation_mode\":\"null\",\"max_running_requests\":100000,\"max_total_num_tokens\":100000000,"
                 "\"internal_states\":[{}],\"disaggregated_params\":{}}",
                 role, base_port + c->place));
}

static void serve_stat(conn *c) {
  static char body[1 << 16];
  int used = 0;
  for (int i = 0; i < num_ports; i++) used += requests_of[i] > 0;
  int n = sprintf(body, "{\"requests\":%llu,\"renders\":%llu,\"tokens\":%llu,\"ports_used\":%d,\"by_port\":[",
                  (unsigned long long)num_requests, (unsigned long long)num_renders, (unsigned long long)num_tokens, used);
  for (int i = 0; i < num_ports && i < 2048; i++)
    n += sprintf(body + n, "%s%llu", i ? "," : "", (unsigned long long)requests_of[i]);
  n += sprintf(body + n, "]}");
  answer(c, 200, body, n);
}

static void serve_get(conn *c, span path) {
  static const char models[] =
      "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1700000000,\"owned_by\":\"fake\","
      "\"root\":\"m\",\"max_model_len\":262144}]}";
  static const char model_info[] =
      "{\"model_path\":\"m\",\"tokenizer_path\":\"m\",\"is_generation\":true,\"model_type\":\"llama\"}";
  if (!strncmp(path.at, "/_ctl", 5)) {
    long itl = number_after(path, "itl_us=", -1), count = number_after(path, "store=", 0);
    if (itl >= 0) itl_ns = itl * 1000ull;
    if (count > 0) store_blocks(count);
    answer(c, 200, "{}", 2);
  } else if (!strncmp(path.at, "/_stat", 6)) serve_stat(c);
  else if (!strncmp(path.at, "/kv_events/stream", 17)) open_events(c);
  else if (!strncmp(path.at, "/v1/models", 10)) answer(c, 200, models, sizeof models - 1);
  else if (!strncmp(path.at, "/get_model_info", 15) || !strncmp(path.at, "/model_info", 11))
    answer(c, 200, model_info, sizeof model_info - 1);
  else if (!strncmp(path.at, "/health", 7)) answer(c, 200, "{\"status\":\"ok\"}", 15);
  else serve_info(c);
}

static void serve_render(conn *c, int chat, span body) {
  span ids = made_up_ids(body.n);
  char open[64], close[128];
  int before = sprintf(open, "%s{\"request_id\":\"r\",\"token_ids\":", chat ? "" : "[");
  int after = sprintf(close, ",\"sampling_params\":{\"max_tokens\":16},\"model\":\"m\",\"stream\":false}%s", chat ? "" : "]");
  num_renders++;
  put_head(c, 200, before + ids.n + after);
  put(c, open, before);
  put(c, ids.at, ids.n);
  put(c, close, after);
  if (flush(c) < 0) close_conn(c);
}

static void start_stream(conn *c, long tokens) {
  static const char head[] =
      "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
  put(c, head, sizeof head - 1);
  c->streaming = 1;
  c->left = c->total = tokens;
  c->due = now_ns();
  stream(c);
}

static void serve_plain(conn *c, span body, long tokens) {
  char params[512] = "", transfer[512] = "", text[2048];
  int context = has(body, "context_only");
  unsigned long long id = next_id++, t = now_ns();
  span ids = {NULL, 0};
  if (context) {
    unsigned long long asked = number_in_body(body, "\"disagg_request_id\"", id);
    sprintf(params,
            ",\"disaggregated_params\":{\"request_type\":\"context_only\",\"first_gen_tokens\":[7],"
            "\"ctx_request_id\":%llu,\"disagg_request_id\":%llu,\"schedule_style\":0,"
            "\"encoded_opaque_state\":\"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1\"}",
            asked, asked);
    ids = token_list(body);
    if (!ids.n) ids = made_up_ids(body.n);
  }
  if (has(body, "\"do_remote_decode\":true") || has(body, "\"do_remote_decode\": true"))
    sprintf(transfer,
            ",\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_block_ids\":[1,2,3,4],"
            "\"remote_engine_id\":\"e%llu\",\"remote_request_id\":\"r%llu\",\"remote_host\":\"127.0.0.1\","
            "\"remote_port\":5600,\"tp_size\":1}", id, id);
  const char *finish = context ? "not_finished" : "length";
  const char *shape = c->chat ? "{\"id\":\"chatcmpl-7f3a9c21\",\"object\":\"chat.completion\",\"created\":1700000000,"
                                "\"model\":\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
                                "\"content\":\" @%020llu@\"},\"logprobs\":null,\"finish_reason\":\"%s\",\"stop_reason\":null"
                                "%s}],\"usage\":{\"prompt_tokens\":8,\"completion_tokens\":%ld,\"total_tokens\":%ld}%s"
                              : "{\"id\":\"cmpl-7f3a9c21\",\"object\":\"text_completion\",\"created\":1700000000,"
                                "\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\" @%020llu@\",\"logprobs\":null,"
                                "\"finish_reason\":\"%s\",\"stop_reason\":null%s}],\"usage\":{\"prompt_tokens\":8,"
                                "\"completion_tokens\":%ld,\"total_tokens\":%ld}%s";
  long completion = context ? 1 : tokens;
  int n = sprintf(text, shape, t, finish, params, completion, completion + 8, transfer);
  static const char list[] = ",\"prompt_token_ids\":";
  put_head(c, 200, n + (ids.n ? sizeof list - 1 + ids.n : 0) + 1);
  put(c, text, n);
  if (ids.n) {
    put(c, list, sizeof list - 1);
    put(c, ids.at, ids.n);
  }
  put(c, "}", 1);
  if (flush(c) < 0) close_conn(c);
}

static void serve_post(conn *c, span path, span body) {
  c->chat = !strncmp(path.at, "/v1/chat", 8);
  if (path.n > 7 && !strncmp(path.at + path.n - 7, "/render", 7)) { serve_render(c, c->chat, body); return; }
  if (!strncmp(path.at, "/handoff/release", 16)) { answer(c, 200, "{}", 2); return; }
  if (!memmem(path.at, path.n, "completions", 11)) { answer(c, 404, "{}", 2); return; }
  long tokens = number_in_body(body, "\"max_tokens\"", -1);
  if (tokens < 1) tokens = number_in_body(body, "\"max_completion_tokens\"", 16);
  num_requests++;
  requests_of[c->place]++;
  if (c->place < num_prefill && has(body, "bootstrap_room")) tokens = 1;
  if (has(body, "\"stream\":true") || has(body, "\"stream\": true")) start_stream(c, tokens);
  else serve_plain(c, body, tokens);
}

int main(int argc, char **argv) {
  if (argc != 4) { fprintf(stderr, "usage: worker BASE_PORT PORTS PREFILL_PORTS\n"); return 2; }
  base_port = atoi(argv[1]);
  num_ports = atoi(argv[2]);
  num_prefill = atoi(argv[3]);
  requests_of = calloc(num_ports, sizeof *requests_of);
  signal(SIGPIPE, SIG_IGN);
  struct rlimit files = {65536, 65536};
  setrlimit(RLIMIT_NOFILE, &files);
  ep = epoll_create1(0);
  for (int place = 0; place < num_ports; place++)
    if (listen_on(place)) { perror("listen"); return 1; }
  serve_forever();
}
