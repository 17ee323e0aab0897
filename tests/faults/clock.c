/* Preloaded before a coordinator: adds the seconds in the file $FAULT_CLOCK to its host's clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long added_seconds(void) {
  long seconds = 0;
  FILE *file = fopen(getenv("FAULT_CLOCK"), "r");
  if (file) {
    if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
    fclose(file);
  }
  return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*original)(clockid_t, struct timespec *);
  if (!original) original = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = original(clock, now);
  if (!failed && clock == CLOCK_REALTIME) now->tv_sec += added_seconds();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec time;
  int failed = clock_gettime(CLOCK_REALTIME, &time);
  now->tv_sec = time.tv_sec;
  now->tv_usec = time.tv_nsec / 1000;
  return failed;
}
