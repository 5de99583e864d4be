/* The yardstick of `scenarios.bench.cpu`: what a relay costs without an interpreter.

   c_relay push PORT CERTIFICATE FILE               dials 127.0.0.1:PORT and sends the file
   c_relay take CERTIFICATE STORE BYTES HASH [PORT] listens, prints its port, receives BYTES, stores them in STORE,
                                                    and with PORT sends them on to 127.0.0.1:PORT

   One thread, TLS 1.3 with OpenSSL's defaults, and for each piece of 256 KiB: received into the buffer from which it is
   hashed, sent on and written. The buffer has 1 MiB, as a chunk has, and is written past the page cache where the file
   system allows that, as a relay's chunks are. HASH: `none`, `blake2b` (OpenSSL's), or the path of a libLLVM, whose
   BLAKE3 is the reference implementation in C and assembly. Each mode ends with one line of JSON: the CPU seconds, user
   and system, from the first byte to the last. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 256 << 10, CHUNK = 1 << 20, PAGE = 4096, HASHER_BYTES = 4096 };

static void (*blake3_init)(void *);
static void (*blake3_update)(void *, const void *, size_t);
static void (*blake3_finalize)(const void *, uint8_t *, size_t);
static int with_blake2b;
static double hash_s;

static void fail(const char *what) {
    fprintf(stderr, "c_relay: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static double cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void report(double began_cpu_s, double began_s) {
    printf("{\"cpu_s\": %.4f, \"hash_s\": %.4f, \"seconds\": %.4f}\n", cpu_s() - began_cpu_s, hash_s,
           seconds(CLOCK_MONOTONIC) - began_s);
}

static void choose_hash(const char *name) {
    if (!strcmp(name, "none")) return;
    if (!strcmp(name, "blake2b")) {
        with_blake2b = 1;
        return;
    }
    void *library = dlopen(name, RTLD_NOW);
    if (!library) fail(name);
    blake3_init = (void (*)(void *))dlsym(library, "llvm_blake3_hasher_init");
    blake3_update = (void (*)(void *, const void *, size_t))dlsym(library, "llvm_blake3_hasher_update");
    blake3_finalize = (void (*)(const void *, uint8_t *, size_t))dlsym(library, "llvm_blake3_hasher_finalize");
    if (!blake3_init || !blake3_update || !blake3_finalize) fail("this libLLVM exports no BLAKE3");
}

static void hash_piece(const uint8_t *data, size_t size) {
    static _Alignas(64) uint8_t hasher[HASHER_BYTES];
    static volatile uint8_t kept;
    uint8_t digest[64];
    if (!blake3_init && !with_blake2b) return;
    double began_s = seconds(CLOCK_THREAD_CPUTIME_ID);
    if (with_blake2b) {
        EVP_Digest(data, size, digest, NULL, EVP_blake2b512(), NULL);
    } else {
        blake3_init(hasher);
        blake3_update(hasher, data, size);
        blake3_finalize(hasher, digest, 32);
    }
    kept ^= digest[0];
    hash_s += seconds(CLOCK_THREAD_CPUTIME_ID) - began_s;
}

static SSL_CTX *tls_context(int server, const char *certificate) {
    SSL_CTX *context = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method());
    SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
    SSL_CTX_set_read_ahead(context, 1); /* one system call for many records */
    SSL_CTX_set_default_read_buffer_len(context, PIECE);
    SSL_CTX_set_num_tickets(context, 0);
    if (server && (SSL_CTX_use_certificate_file(context, certificate, SSL_FILETYPE_PEM) != 1 ||
                   SSL_CTX_use_PrivateKey_file(context, certificate, SSL_FILETYPE_PEM) != 1))
        fail("certificate");
    return context;
}

static SSL *secured(int server, int descriptor, const char *certificate) {
    int on = 1;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    SSL *tls = SSL_new(tls_context(server, certificate));
    SSL_set_fd(tls, descriptor);
    if ((server ? SSL_accept(tls) : SSL_connect(tls)) != 1) fail("handshake");
    return tls;
}

static SSL *dial(const char *port, const char *certificate) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int descriptor = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(descriptor, (struct sockaddr *)&address, sizeof address)) fail("connect");
    return secured(0, descriptor, certificate);
}

static SSL *take_one(const char *certificate) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1)) fail("listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return secured(1, accept(listener, NULL, NULL), certificate);
}

static void send_all(SSL *tls, const uint8_t *data, size_t size) {
    while (size) {
        int sent = SSL_write(tls, data, size < PIECE ? size : PIECE);
        if (sent <= 0) fail("send");
        data += sent;
        size -= sent;
    }
}

static void write_all(int descriptor, const uint8_t *data, size_t size, off_t offset) {
    while (size) {
        ssize_t written = pwrite(descriptor, data, size, offset);
        if (written <= 0) fail("write");
        data += written;
        size -= written;
        offset += written;
    }
}

static void wait_for_end(SSL *tls) { /* so that nobody's socket is reset while bytes are on their way */
    uint8_t byte;
    SSL_read(tls, &byte, 1);
}

static int push(const char *port, const char *certificate, const char *path) {
    int file = open(path, O_RDONLY);
    SSL *tls = dial(port, certificate);
    uint8_t *buffer = malloc(PIECE);
    double began_cpu_s = cpu_s(), began_s = seconds(CLOCK_MONOTONIC);
    ssize_t size;
    while ((size = read(file, buffer, PIECE)) > 0) {
        hash_piece(buffer, size);
        send_all(tls, buffer, size);
    }
    report(began_cpu_s, began_s);
    wait_for_end(tls);
    return 0;
}

static int take(const char *certificate, const char *store, uint64_t left, const char *next_port) {
    int file = open(store, O_WRONLY | O_CREAT | O_TRUNC | O_DIRECT, 0600);
    if (file < 0) file = open(store, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (file < 0) fail(store);
    uint8_t *buffer = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    SSL *next = next_port ? dial(next_port, certificate) : NULL;
    SSL *tls = take_one(certificate);
    double began_cpu_s = cpu_s(), began_s = seconds(CLOCK_MONOTONIC);
    off_t offset = 0;
    while (left) {
        size_t filled = 0, wanted = left < CHUNK ? left : CHUNK;
        while (filled < wanted) {
            size_t start = filled, piece = wanted - filled < PIECE ? wanted - filled : PIECE;
            while (filled < start + piece) {
                int size = SSL_read(tls, buffer + filled, start + piece - filled);
                if (size <= 0) fail("receive");
                filled += size;
            }
            hash_piece(buffer + start, piece);
            if (next) send_all(next, buffer + start, piece);
        }
        size_t whole = (filled + PAGE - 1) / PAGE * PAGE;
        write_all(file, buffer, whole, offset);
        offset += whole;
        left -= filled;
    }
    fdatasync(file);
    report(began_cpu_s, began_s);
    SSL_write(tls, "!", 1);
    if (next) wait_for_end(next);
    return 0;
}

int main(int count, char **words) {
    if (count == 5 && !strcmp(words[1], "push")) return push(words[2], words[3], words[4]);
    if ((count == 6 || count == 7) && !strcmp(words[1], "take")) {
        choose_hash(words[5]);
        return take(words[2], words[3], strtoull(words[4], NULL, 10), count == 7 ? words[6] : NULL);
    }
    fprintf(stderr, "c_relay: push PORT CERTIFICATE FILE, or take CERTIFICATE STORE BYTES HASH [PORT]\n");
    return 2;
}
