/* The service that every supervisor of benchmarks/supervisors.py runs.
 *
 *     service FOLDER NAME [grandchild | write PATH | log BYTES]
 *
 * At its start it appends "PID NANOSECONDS" (CLOCK_MONOTONIC) to FOLDER/NAME, then it waits for ever.
 *   grandchild  before that, it leaves behind a double-forked process in a session of its own, named NAME-grandchild
 *   write PATH  it appends to PATH all the while: D state once that file system is frozen
 *   log BYTES   before it waits it writes so much to stdout, and appends "PID LONGEST" to FOLDER/NAME-log, the
 *               nanoseconds of its slowest write
 */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *folder;

static long long now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000000000LL + at.tv_nsec;
}

static void stamp(const char *name, long long value)
{
	char path[4096], line[64];
	int fd, length = snprintf(line, sizeof line, "%d %lld\n", getpid(), value);

	snprintf(path, sizeof path, "%s/%s", folder, name);
	fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
	if (fd < 0 || write(fd, line, length) != length)
		_exit(2);
	close(fd);
}

static void leave_grandchild(const char *program, const char *name)
{
	char other[256];

	snprintf(other, sizeof other, "%s-grandchild", name);
	if (fork() == 0) {
		setsid();
		if (fork() == 0)
			execl(program, program, folder, other, (char *)NULL);
		_exit(0);
	}
	wait(NULL);
}

static void write_for_ever(const char *path)
{
	int fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);

	while (fd >= 0 && write(fd, ".", 1) == 1)
		usleep(20000);
}

static void write_log(const char *name, long long bytes)
{
	static char lines[1000];
	char other[256];
	long long longest = 0;

	memset(lines, 'x', sizeof lines);
	for (size_t end = 99; end < sizeof lines; end += 100)
		lines[end] = '\n';
	while (bytes > 0) {
		long long began = now(), took;
		ssize_t wrote = write(1, lines, bytes < (long long)sizeof lines ? (size_t)bytes : sizeof lines);

		if (wrote < 0)
			_exit(3);
		took = now() - began;
		longest = took > longest ? took : longest;
		bytes -= wrote;
	}
	snprintf(other, sizeof other, "%s-log", name);
	stamp(other, longest);
}

int main(int argc, char **argv)
{
	long long began = now();

	if (argc < 3)
		return 64;
	folder = argv[1];
	stamp(argv[2], began);
	if (argc > 3 && !strcmp(argv[3], "grandchild"))
		leave_grandchild(argv[0], argv[2]);
	if (argc > 4 && !strcmp(argv[3], "write"))
		write_for_ever(argv[4]);
	if (argc > 4 && !strcmp(argv[3], "log"))
		write_log(argv[2], atoll(argv[4]));
	for (;;)
		pause();
}
