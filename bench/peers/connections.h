// Connections and HTTP/1.1 of the fake worker: epoll, keep-alive, chunked bodies, streams on a timer.
//
// worker.c gives the routes: serve_get, serve_post, and stream, which a due connection is handed to.
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
  int fd, place;  // place: which of the ports
  int listening, events;
  char *in, *out;
  size_t in_len, in_cap, out_len, out_cap, out_off;
  int streaming, chat, left, total;  // of the answer being streamed
  uint64_t due, seq;
  int queued, dead;
  struct conn *next, *next_reader;
} conn;

typedef struct { const char *at; size_t n; } span;

static int ep, base_port, num_ports, num_prefill;
static uint64_t itl_ns, next_id = 1, num_requests, num_renders, num_tokens, stored_blocks;
static uint64_t *requests_of;
static conn *queue_head, *queue_tail;  // streams that wait for their next token, by time
static conn *graveyard;                // closed connections, freed between rounds
static conn *readers;                  // of KV events

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

// ---------------------------------------------------------------- connections

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
  for (conn **r = &readers; c->events && *r; r = &(*r)->next_reader)
    if (*r == c) { *r = c->next_reader; break; }
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

static void put_head(conn *c, int status, size_t n) {
  char head[192];
  put(c, head, sprintf(head, "HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", status,
                       status == 200 ? "OK" : "Not Found", n));
}

static void answer(conn *c, int status, const char *body, size_t n) {
  put_head(c, status, n);
  put(c, body, n);
  if (flush(c) < 0) close_conn(c);
}

static void serve_get(conn *c, span path);
static void serve_post(conn *c, span path, span body);
static void stream(conn *c);

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

// ---------------------------------------------------------------- requests

static const char *header(span head, const char *name) {
  size_t length = strlen(name);
  for (const char *line = head.at, *end = head.at + head.n; line < end;) {
    if (!strncasecmp(line, name, length) && line[length] == ':') {
      for (line += length + 1; *line == ' '; line++) {}
      return line;
    }
    line = memchr(line, '\n', end - line);
    if (!line) break;
    line++;
  }
  return NULL;
}

// Join a chunked body in place once all of it is here. Its bytes in the buffer with framing, 0 = more to come.
static size_t dechunk(char *body, size_t n, size_t *joined) {
  size_t at = 0, length;
  for (size_t pass = *joined = 0; pass < 2; pass++) {  // look first, move then
    for (at = 0;; at += length + 2) {
      char *end = memmem(body + at, n - at, "\r\n", 2);
      if (!end) return 0;
      length = strtoul(body + at, NULL, 16);
      at = end + 2 - body;
      if (at + length + 2 > n) return 0;
      if (!length) break;
      if (pass) {
        memmove(body + *joined, body + at, length);
        *joined += length;
      }
    }
  }
  return at + 2;
}

// Serve one request if all of it is in the buffer: the bytes that it took, 0 = more to come, -1 = no HTTP/1.
static ssize_t serve_one(conn *c) {
  if (c->in_len >= 4 && memcmp(c->in, "GET ", 4) && memcmp(c->in, "HEAD", 4) && memcmp(c->in, "POST", 4)) return -1;
  char *head_end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
  if (!head_end) return 0;
  span head = {c->in, head_end + 4 - c->in};
  const char *length = header(head, "content-length"), *coding = header(head, "transfer-encoding");
  size_t size = length ? strtoul(length, NULL, 10) : 0, taken = size;
  if (coding && !strncasecmp(coding, "chunked", 7)) {
    taken = dechunk(c->in + head.n, c->in_len - head.n, &size);
    if (!taken) return 0;
  } else if (c->in_len < head.n + size) return 0;
  char *start = memchr(c->in, ' ', head.n), *end = start ? memchr(start + 1, ' ', c->in + head.n - start - 1) : NULL;
  if (!end) return -1;
  span path = {start + 1, end - start - 1};
  if (*c->in == 'P') serve_post(c, path, (span){c->in + head.n, size});
  else serve_get(c, path);
  return head.n + taken;
}

static void serve_input(conn *c) {
  static int inside;  // stream() calls back: the outer loop goes on
  if (inside) return;
  inside = 1;
  while (!c->dead && !c->streaming && !c->events && c->in_len) {
    ssize_t taken = serve_one(c);
    if (taken < 0) close_conn(c);
    if (taken <= 0 || c->dead) break;
    c->in_len -= taken;
    memmove(c->in, c->in + taken, c->in_len);
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
    c->place = listener->place;
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
  }
}

static int listen_on(int place) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in a = {
      .sin_family = AF_INET, .sin_port = htons(base_port + place), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(fd, (void *)&a, sizeof a) || listen(fd, 1024)) return -1;
  conn *c = calloc(1, sizeof *c);
  c->fd = fd;
  c->place = place;
  c->listening = 1;
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  return epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
}

static void serve_event(struct epoll_event *event) {
  conn *c = event->data.ptr;
  if (c->listening) { accept_all(c); return; }
  if (c->dead) return;
  if (event->events & EPOLLOUT) {
    if (flush(c) < 0) { close_conn(c); return; }
    if (!c->out_len) watch(c, EPOLLIN);
  }
  if (event->events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
}

static void serve_forever(void) {
  static struct epoll_event events[512];
  for (;;) {
    struct timespec wait, *timeout = NULL;
    if (queue_head) {
      uint64_t t = now_ns(), left = queue_head->due > t ? queue_head->due - t : 0;
      wait = (struct timespec){left / 1000000000ull, left % 1000000000ull};
      timeout = &wait;
    }
    int n = epoll_pwait2(ep, events, 512, timeout, NULL);
    for (int i = 0; i < n; i++) serve_event(&events[i]);
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
