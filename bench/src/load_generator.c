// HTTP/1.1 load generator for plain and streamed completions: one thread, epoll, keep-alive connections.
//
//   load_generator -p PORT -u PATH -b BODIES -c CONNECTIONS -d SECONDS [-w WARM_UP_SECONDS] [-r PER_SECOND] [-P PID]
//
// BODIES has one JSON body a line. Closed loop; with -r open loop, where latency counts from the scheduled instant.
// Prints one JSON object. `cpu` is the CPU time of process PID from the start of the measured phase until all answers
// are in. Texts "@<monotonic ns, 20 digits>@" in answers are the sender's clock: `one_way_us` is their age on arrival.
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
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct { char *bytes; size_t n; } text;
typedef struct { uint64_t *at; size_t n, cap; } samples;
enum { IDLE, SENDING, HEAD, BODY };
enum { CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER };

typedef struct {
  int fd, state;
  text request;
  size_t sent;
  char head[16384];
  size_t head_len;
  int status, chunked, closes;
  long left;  // bytes of the body, or of the chunk
  int chunk_state, line_len;
  char line[64];
  int in_stamp, digits;
  uint64_t stamp, started, first;
} conn;

static int port, ep, num_conns = 16, measuring;
static const char *path = "/v1/completions";
static double rate, seconds = 5, warm_up;
static text *requests;
static size_t num_requests, issued, in_flight;
static conn *conns;
static int *idle, num_idle;
static samples latency, first_byte, one_way;
static uint64_t done, errors, chunks;
static char first_error[256];

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static double cpu_seconds(pid_t pid) {
  clockid_t clock;
  struct timespec t;
  if (!pid || clock_getcpuclockid(pid, &clock) || clock_gettime(clock, &t)) return 0;
  return t.tv_sec + t.tv_nsec / 1e9;
}

static void add(samples *s, uint64_t value) {
  if (s->n == s->cap) {
    s->cap = s->cap ? s->cap * 2 : 4096;
    s->at = realloc(s->at, s->cap * sizeof *s->at);
  }
  s->at[s->n++] = value;
}

static int by_value(const void *a, const void *b) {
  uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return x < y ? -1 : x > y;
}

static double quantile_us(samples *s, double q) { return s->n ? s->at[(size_t)(q * (s->n - 1) + 0.5)] / 1000.0 : -1; }

static void note_error(const char *what) {
  if (measuring) errors++;
  if (!first_error[0]) snprintf(first_error, sizeof first_error, "%s", what);
}

static void open_conn(conn *c) {
  int one = 1;
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (connect(c->fd, (void *)&a, sizeof a) && errno != EINPROGRESS) { perror("connect"); exit(1); }
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e);
  c->state = IDLE;
}

static void watch(conn *c, uint32_t events) {
  struct epoll_event e = {.events = events, .data.ptr = c};
  epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
}

static void push_request(conn *c) {
  while (c->sent < c->request.n) {
    ssize_t sent = send(c->fd, c->request.bytes + c->sent, c->request.n - c->sent, MSG_NOSIGNAL);
    if (sent < 0) { watch(c, EPOLLIN | EPOLLOUT); return; }
    c->sent += sent;
  }
  if (c->state == SENDING) { c->state = HEAD; }
  watch(c, EPOLLIN);
}

static void start(conn *c, uint64_t t) {
  c->request = requests[issued++ % num_requests];
  c->sent = c->head_len = 0;
  c->started = t;
  c->first = 0;
  c->in_stamp = 0;
  c->state = SENDING;
  in_flight++;
  push_request(c);
}

static void free_conn(conn *c) {
  in_flight--;
  c->state = IDLE;
  idle[num_idle++] = c - conns;
}

static void fail(conn *c, const char *why) {
  if (c->state != IDLE) { free_conn(c); note_error(why); }
  close(c->fd);
  open_conn(c);
}

static void complete(conn *c, uint64_t t) {
  char why[32];
  if (c->status != 200) { snprintf(why, sizeof why, "status %d", c->status); note_error(why); }
  else if (measuring) {
    done++;
    add(&latency, t - c->started);
    add(&first_byte, (c->first ? c->first : t) - c->started);
  }
  free_conn(c);
  if (c->closes) { close(c->fd); open_conn(c); }
}

static void scan_stamps(conn *c, const char *p, size_t n, uint64_t t) {
  for (const char *end = p + n; p < end; p++) {
    if (!c->in_stamp) {
      p = memchr(p, '@', end - p);
      if (!p) return;
      c->in_stamp = 1;
      c->digits = 0;
      c->stamp = 0;
    } else if (*p >= '0' && *p <= '9') {
      c->stamp = c->stamp * 10 + (*p - '0');
      c->digits++;
    } else {
      if (*p == '@' && c->digits == 20) {
        if (!c->first) c->first = t;
        chunks++;
        if (measuring) add(&one_way, t > c->stamp ? t - c->stamp : 0);
      }
      c->in_stamp = 0;
    }
  }
}

static void read_head(conn *c) {
  c->status = atoi(c->head + 9);
  c->chunked = c->closes = 0;
  c->left = 0;
  for (char *line = c->head; line;) {
    if (!strncasecmp(line, "content-length:", 15)) c->left = atol(line + 15);
    else if (!strncasecmp(line, "transfer-encoding: chunked", 26)) c->chunked = 1;
    else if (!strncasecmp(line, "connection: close", 17)) c->closes = 1;
    line = strstr(line, "\r\n");
    if (line) line += 2;
  }
  c->state = BODY;
  c->chunk_state = CHUNK_SIZE;
  c->line_len = 0;
}

// 1: the answer is complete; -1: it makes no sense.
static int feed(conn *c, const char *p, size_t n, uint64_t t) {
  const char *end = p + n;
  while (p < end) {
    if (c->state == HEAD) {
      size_t old = c->head_len, room = sizeof c->head - 1 - old, take = (size_t)(end - p) < room ? (size_t)(end - p) : room;
      memcpy(c->head + old, p, take);
      c->head[c->head_len += take] = 0;
      char *head_end = strstr(c->head, "\r\n\r\n");
      if (!head_end) {
        if (take == room) return -1;
        return 0;
      }
      p += head_end + 4 - c->head - old;
      *head_end = 0;
      read_head(c);
      if (!c->chunked && c->left == 0) return 1;
      continue;
    }
    if (!c->chunked) {
      size_t take = end - p < c->left ? end - p : c->left;
      scan_stamps(c, p, take, t);
      p += take;
      if (!(c->left -= take)) return 1;
      continue;
    }
    switch (c->chunk_state) {
      case CHUNK_SIZE:
        if (*p == '\n') {
          c->line[c->line_len] = 0;
          c->line_len = 0;
          c->left = strtol(c->line, NULL, 16);
          c->chunk_state = c->left ? CHUNK_DATA : TRAILER;
        } else if (c->line_len < (int)sizeof c->line - 1) c->line[c->line_len++] = *p;
        p++;
        break;
      case CHUNK_DATA: {
        size_t take = end - p < c->left ? end - p : c->left;
        scan_stamps(c, p, take, t);
        p += take;
        if (!(c->left -= take)) c->chunk_state = CHUNK_END;
        break;
      }
      case CHUNK_END:
        if (*p++ == '\n') c->chunk_state = CHUNK_SIZE;
        break;
      case TRAILER:
        if (*p == '\n') {
          if (!c->line_len) return 1;
          c->line_len = 0;
        } else if (*p != '\r') c->line_len++;
        p++;
    }
  }
  return 0;
}

static void receive(conn *c) {
  static char buffer[1 << 18];
  for (;;) {
    ssize_t got = recv(c->fd, buffer, sizeof buffer, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
      fail(c, got ? strerror(errno) : "closed");
      return;
    }
    if (c->state == IDLE) { fail(c, "unasked bytes"); return; }
    uint64_t t = now_ns();
    int verdict = feed(c, buffer, got, t);
    if (verdict < 0) { fail(c, "head too long"); return; }
    if (verdict > 0) { complete(c, t); return; }
    if ((size_t)got < sizeof buffer) return;
  }
}

static double run_phase(double length) {
  static struct epoll_event events[512];
  uint64_t begin = now_ns(), end = begin + (uint64_t)(length * 1e9);
  double next = begin, step = rate > 0 ? 1e9 / rate : 0;
  for (;;) {
    uint64_t t = now_ns();
    if (t >= end && !in_flight) break;
    if (t > end + 15000000000ull) { note_error("answers missing"); break; }
    while (t < end && num_idle && (step == 0 || next <= t)) {
      start(&conns[idle[--num_idle]], step ? (uint64_t)next : now_ns());
      next += step;
    }
    struct timespec wait = {0, 20000000};
    if (step && next > t && next - t < 2e7) wait.tv_nsec = (long)(next - t);
    int n = epoll_pwait2(ep, events, 512, &wait, NULL);
    for (int i = 0; i < n; i++) {
      conn *c = events[i].data.ptr;
      if ((events[i].events & EPOLLOUT) && c->sent < c->request.n) push_request(c);
      if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
    }
  }
  return (now_ns() - begin) / 1e9;
}

static void load_bodies(const char *file) {
  FILE *f = fopen(file, "r");
  if (!f) { perror(file); exit(1); }
  char *line = NULL;
  size_t cap = 0, room = 0;
  for (ssize_t n; (n = getline(&line, &cap, f)) > 0;) {
    if (line[n - 1] == '\n') line[--n] = 0;
    if (!n) continue;
    if (num_requests == room) requests = realloc(requests, (room = room ? room * 2 : 64) * sizeof *requests);
    char *bytes = malloc(n + 512);
    int head = sprintf(bytes,
                       "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                       "Content-Length: %zd\r\n\r\n",
                       path, port, n);
    memcpy(bytes + head, line, n);
    requests[num_requests++] = (text){bytes, head + n};
  }
  fclose(f);
}

int main(int argc, char **argv) {
  const char *bodies = NULL;
  pid_t pid = 0;
  for (int o; (o = getopt(argc, argv, "p:u:b:c:d:w:r:P:")) != -1;) switch (o) {
    case 'p': port = atoi(optarg); break;
    case 'u': path = optarg; break;
    case 'b': bodies = optarg; break;
    case 'c': num_conns = atoi(optarg); break;
    case 'd': seconds = atof(optarg); break;
    case 'w': warm_up = atof(optarg); break;
    case 'r': rate = atof(optarg); break;
    case 'P': pid = atoi(optarg); break;
    default: return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  load_bodies(bodies);
  ep = epoll_create1(0);
  conns = calloc(num_conns, sizeof *conns);
  idle = calloc(num_conns, sizeof *idle);
  for (int i = 0; i < num_conns; i++) { open_conn(&conns[i]); idle[num_idle++] = i; }
  if (warm_up > 0) run_phase(warm_up);
  measuring = 1;
  chunks = 0;
  first_error[0] = 0;
  double cpu = cpu_seconds(pid), elapsed = run_phase(seconds);
  cpu = cpu_seconds(pid) - cpu;
  samples *all[] = {&latency, &first_byte, &one_way};
  for (int i = 0; i < 3; i++) qsort(all[i]->at, all[i]->n, sizeof(uint64_t), by_value);
  for (char *p = first_error; *p; p++) if (*p == '"' || *p == '\\' || *p < 32) *p = ' ';
  printf("{\"done\":%llu,\"errors\":%llu,\"error\":\"%s\",\"seconds\":%.4f,\"per_second\":%.1f,\"chunks\":%llu,\"cpu\":%.6f,"
         "\"latency_us\":{\"p50\":%.1f,\"p99\":%.1f},\"first_byte_us\":{\"p50\":%.1f,\"p99\":%.1f},"
         "\"one_way_us\":{\"p50\":%.1f,\"p99\":%.1f}}\n",
         (unsigned long long)done, (unsigned long long)errors, first_error, elapsed, done / elapsed,
         (unsigned long long)chunks, cpu, quantile_us(&latency, .5), quantile_us(&latency, .99),
         quantile_us(&first_byte, .5), quantile_us(&first_byte, .99), quantile_us(&one_way, .5),
         quantile_us(&one_way, .99));
  return errors || !done;
}
