/* Registers the options of Pyxis with srun, and writes their values to a file.
 *
 * Pyxis itself needs enroot and an image. This plugin lets the real srun parse a command line as it
 * does where Pyxis is installed; the step then runs without a container. The names and arguments
 * are those of NVIDIA/pyxis 0.20, README, "Usage".
 */
#include <stdio.h>
#include <stdlib.h>

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis, 1);

static const char *const names[] = {"container-image", "container-mounts"};

static int record(int value, const char *argument, int remote)
{
	const char *path = getenv("PYXIS_OPTIONS");
	FILE *file = remote || path == NULL ? NULL : fopen(path, "a");

	if (file != NULL) {
		fprintf(file, "%s=%s\n", names[value], argument);
		fclose(file);
	}
	return ESPANK_SUCCESS;
}

static struct spank_option image = {
	"container-image", "[USER@][REGISTRY#]IMAGE[:TAG]|PATH", "the image", 1, 0, record
};
static struct spank_option mounts = {
	"container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]", "bind mounts", 1, 1, record
};

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
	(void)argc;
	(void)argv;
	if (spank_context() == S_CTX_ALLOCATOR)
		return ESPANK_SUCCESS;
	if (spank_option_register(spank, &image) != ESPANK_SUCCESS)
		return ESPANK_ERROR;
	return spank_option_register(spank, &mounts);
}
