// A worker that costs almost nothing: one-thread epoll server on consecutive loopback ports.
//
//   fake_worker BASE_PORT PORTS
//
// Serves POST /v1/completions and /v1/chat/completions, plain or streamed, with the hand-off fields of a context or a
// generation leg as this project's workers send them; GET /health, /server_info and /v1/models; and GET /_ctl?itl_us=N
// (time between streamed tokens, 0 = all at once). Every token's text is "@<monotonic ns, 20 digits>@", from which the
// load generator measures the one-way delay.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct conn {
  int fd, listening;
  char *in;
  size_t in_len, in_cap;
  char *out;
  size_t out_len, out_cap, out_off;
  int streaming, chat, left, total;  // of the answer being streamed
  uint64_t due;
  int queued, dead;
  struct conn *next;
} conn;

static int ep;
static uint64_t itl_ns, next_id = 1;
static conn *queue_head, *queue_tail;  // streams that wait for their next token, by time
static conn *graveyard;                // closed connections, freed between rounds

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void enqueue(conn *c) {
  c->next = NULL;
  c->queued = 1;
  if (queue_tail) queue_tail->next = c;
  else queue_head = c;
  queue_tail = c;
}

static void bury(conn *c) { c->next = graveyard; graveyard = c; }

static void close_conn(conn *c) {
  if (c->dead) return;
  c->dead = 1;
  epoll_ctl(ep, EPOLL_CTL_DEL, c->fd, NULL);
  close(c->fd);
  if (!c->queued) bury(c);
}

static void watch(conn *c, uint32_t events) {
  struct epoll_event e = {.events = events, .data.ptr = c};
  epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
}

static void put(conn *c, const char *bytes, size_t n) {
  if (c->out_len + n > c->out_cap) {
    c->out_cap = (c->out_len + n) * 2 + 1024;
    c->out = realloc(c->out, c->out_cap);
  }
  memcpy(c->out + c->out_len, bytes, n);
  c->out_len += n;
}

static int flush(conn *c) {
  while (c->out_off < c->out_len) {
    ssize_t sent = send(c->fd, c->out + c->out_off, c->out_len - c->out_off, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno != EAGAIN) return -1;
      watch(c, EPOLLIN | EPOLLOUT);
      return 0;
    }
    c->out_off += sent;
  }
  c->out_off = c->out_len = 0;
  return 0;
}

static void put_chunk(conn *c, const char *bytes, size_t n) {
  char size[24];
  put(c, size, sprintf(size, "%zx\r\n", n));
  put(c, bytes, n);
  put(c, "\r\n", 2);
}

static void answer(conn *c, const char *body, size_t n) {
  char head[256];
  put(c, head, sprintf(head, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", n));
  put(c, body, n);
  if (flush(c) < 0) close_conn(c);
}

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

static void serve_input(conn *c);

static void stream(conn *c) {
  char event[1024];
  while (c->left > 0) {
    put_chunk(c, event, token_event(c, event));
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

static void run_queue(uint64_t t) {
  conn *last = queue_tail;  // only what waits now
  while (queue_head && queue_head->due <= t) {
    conn *c = queue_head;
    queue_head = c->next;
    if (!queue_head) queue_tail = NULL;
    c->queued = 0;
    if (c->dead) bury(c);
    else stream(c);
    if (c == last) return;
  }
}

static int has(const char *text, size_t n, const char *word) { return memmem(text, n, word, strlen(word)) != NULL; }

static long number_after(const char *text, size_t n, const char *key, long otherwise) {
  const char *found = memmem(text, n, key, strlen(key));
  if (!found) return otherwise;
  for (found += strlen(key); found < text + n && (*found == ' ' || *found == ':' || *found == '"'); found++) {}
  return strtol(found, NULL, 10);
}

static void serve_get(conn *c, const char *path) {
  static const char models[] =
      "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1700000000,\"owned_by\":\"fake\"}]}";
  static const char info[] = "{\"max_batch_size\":64,\"tokens_per_block\":32}";
  if (!strncmp(path, "/_ctl", 5)) itl_ns = number_after(path, strcspn(path, " "), "itl_us=", 0) * 1000ull;
  if (!strncmp(path, "/v1/models", 10)) answer(c, models, sizeof models - 1);
  else if (!strncmp(path, "/server_info", 12)) answer(c, info, sizeof info - 1);
  else answer(c, "{}", 2);
}

static void serve_completion(conn *c, const char *path, const char *body, size_t n) {
  static char text[8192];
  char params[1024] = "", prompt_ids[256] = "";
  int context = has(body, n, "context_only");
  c->chat = !strncmp(path, "/v1/chat", 8);
  long tokens = number_after(body, n, "\"max_tokens\"", 16);
  if (has(body, n, "\"stream\":true")) {
    static const char head[] =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    put(c, head, sizeof head - 1);
    c->streaming = 1;
    c->left = c->total = tokens;
    c->due = now_ns();
    stream(c);
    return;
  }
  if (context) {
    unsigned long long asked = number_after(body, n, "\"disagg_request_id\"", next_id++);
    sprintf(params,
            ",\"disaggregated_params\":{\"request_type\":\"context_only\",\"first_gen_tokens\":[7],"
            "\"ctx_request_id\":%llu,\"disagg_request_id\":%llu,\"schedule_style\":0,"
            "\"encoded_opaque_state\":\"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1\"}",
            asked, asked);
    sprintf(prompt_ids, ",\"prompt_token_ids\":[1,2,3,4,5,6,7,8]");
  }
  const char *finish = context ? "not_finished" : "length";
  unsigned long long t = now_ns();
  const char *shape = c->chat ? "{\"id\":\"chatcmpl-7f3a9c21\",\"object\":\"chat.completion\",\"created\":1700000000,"
                                "\"model\":\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
                                "\"content\":\" @%020llu@\"},\"logprobs\":null,\"finish_reason\":\"%s\","
                                "\"stop_reason\":null%s}],\"usage\":{\"prompt_tokens\":8,\"completion_tokens\":%ld,"
                                "\"total_tokens\":%ld}%s}"
                              : "{\"id\":\"cmpl-7f3a9c21\",\"object\":\"text_completion\",\"created\":1700000000,"
                                "\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\" @%020llu@\",\"logprobs\":null,"
                                "\"finish_reason\":\"%s\",\"stop_reason\":null%s}],\"usage\":{\"prompt_tokens\":8,"
                                "\"completion_tokens\":%ld,\"total_tokens\":%ld}%s}";
  long completion = context ? 1 : tokens;
  answer(c, text, sprintf(text, shape, t, finish, params, completion, completion + 8, prompt_ids));
}

static size_t content_length(const char *head, size_t n) {
  for (const char *line = head, *end = head + n; line < end;) {
    const char *line_end = memchr(line, '\n', end - line);
    if (!line_end) break;
    if (!strncasecmp(line, "content-length:", 15)) return strtoul(line + 15, NULL, 10);
    line = line_end + 1;
  }
  return 0;
}

// Answer the complete requests in the buffer, up to one whose answer streams.
static void serve_input(conn *c) {
  static int inside;  // stream() calls back: the outer loop goes on
  if (inside) return;
  inside = 1;
  while (!c->dead && !c->streaming && c->in_len) {
    char *head_end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
    if (!head_end) break;
    size_t head = head_end + 4 - c->in, body = content_length(c->in, head);
    if (c->in_len < head + body) break;
    char *path = memchr(c->in, ' ', head);
    if (!path) { close_conn(c); break; }
    if (!strncmp(c->in, "GET ", 4)) serve_get(c, path + 1);
    else serve_completion(c, path + 1, c->in + head, body);
    if (c->dead) break;
    c->in_len -= head + body;
    memmove(c->in, c->in + head + body, c->in_len);
  }
  inside = 0;
}

static void receive(conn *c) {
  for (;;) {
    if (c->in_cap - c->in_len < 8192) {
      c->in_cap = c->in_cap ? c->in_cap * 2 : 16384;
      c->in = realloc(c->in, c->in_cap + 1);
    }
    ssize_t got = recv(c->fd, c->in + c->in_len, c->in_cap - c->in_len, 0);
    if (got > 0) {
      c->in_len += got;
      c->in[c->in_len] = 0;
      if (got < 8192) break;
    } else {
      if (got == 0 || (errno != EAGAIN && errno != EINTR)) { close_conn(c); return; }
      break;
    }
  }
  serve_input(c);
}

static void accept_all(conn *listener) {
  int fd, one = 1;
  while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    conn *c = calloc(1, sizeof *c);
    c->fd = fd;
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
  }
}

static int listen_on(int port) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(fd, (void *)&a, sizeof a) || listen(fd, 1024)) return -1;
  conn *c = calloc(1, sizeof *c);
  c->fd = fd;
  c->listening = 1;
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  return epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
}

int main(int argc, char **argv) {
  if (argc != 3) { fprintf(stderr, "usage: fake_worker BASE_PORT PORTS\n"); return 2; }
  signal(SIGPIPE, SIG_IGN);
  struct rlimit files = {65536, 65536};
  setrlimit(RLIMIT_NOFILE, &files);
  ep = epoll_create1(0);
  for (int i = 0; i < atoi(argv[2]); i++)
    if (listen_on(atoi(argv[1]) + i)) { perror("listen"); return 1; }
  static struct epoll_event events[512];
  for (;;) {
    struct timespec wait, *timeout = NULL;
    if (queue_head) {
      uint64_t t = now_ns(), left = queue_head->due > t ? queue_head->due - t : 0;
      wait.tv_sec = left / 1000000000ull;
      wait.tv_nsec = left % 1000000000ull;
      timeout = &wait;
    }
    int n = epoll_pwait2(ep, events, 512, timeout, NULL);
    for (int i = 0; i < n; i++) {
      conn *c = events[i].data.ptr;
      if (c->listening) { accept_all(c); continue; }
      if (c->dead) continue;
      if (events[i].events & EPOLLOUT) {
        if (flush(c) < 0) { close_conn(c); continue; }
        if (!c->out_len) watch(c, EPOLLIN);
      }
      if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
    }
    run_queue(now_ns());
    while (graveyard) {
      conn *c = graveyard;
      graveyard = c->next;
      free(c->in);
      free(c->out);
      free(c);
    }
  }
}
