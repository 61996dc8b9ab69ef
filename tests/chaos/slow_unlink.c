/* Makes each removed file take 1 ms while the file SWITCH exists, as a parallel file system does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

static void rest(void) {
    if (access(SWITCH, F_OK) == 0)
        usleep(1000);
}

int unlink(const char *path) {
    int (*real)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "unlink");
    rest();
    return real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    int (*real)(int, const char *, int) = (int (*)(int, const char *, int))dlsym(RTLD_NEXT, "unlinkat");
    rest();
    return real(folder, path, flags);
}
